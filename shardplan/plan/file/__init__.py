"""The parts of a Plan file, apart from its workload and attention: sections, parameters, and details for reports."""
