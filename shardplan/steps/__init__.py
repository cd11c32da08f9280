"""The steps of workloads: functions that are traced for the cost model, compiled and run; one module per kind."""
