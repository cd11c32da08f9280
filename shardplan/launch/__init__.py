"""Scripts and manifests that start one evaluation on every host, for launchers that people have already."""
