"""The steps of workloads: what is traced to be priced, compiled to be judged, and run. One module for each kind."""
