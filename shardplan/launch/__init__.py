"""Scripts and manifests that start one evaluation or training on every host, for launchers that people have already."""
