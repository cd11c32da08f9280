"""The search for the fastest plan that fits, exact under the cost model."""
