"""What traces can be compared by: the names that users type, and the views that they stand for."""

DIFF_VIEWS = {  # compared per step
    "steps": "diff_step_times",
    "ops": "diff_operators",
    "kernels": "diff_kernel_names",
    "modules": "diff_modules",
    "paths": "diff_call_paths",
    "python": "diff_python_functions",
}
TREE = "tree"
TREE_VIEWS = {TREE: "diff_tree", "ops": "diff_tree_operators"}  # of one node, as sums over all steps
COUNTERPARTS = {  # views of one trace: those that compare the same in two, step by step
    "step_breakdown": "diff_step_times",
    "operators": "diff_operators",
    "kernels": "diff_kernel_names",
    "modules": "diff_modules",
    "call_tree": "diff_call_paths",
    "python_samples": "diff_python_functions",
}
COMPARED_FIRST = ("step_breakdown", "time_causes")  # on the page of a capture, with a baseline
