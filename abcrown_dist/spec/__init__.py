"""Properties: input sets, output constraints, verdicts; VNN-LIB and robustness front ends."""
