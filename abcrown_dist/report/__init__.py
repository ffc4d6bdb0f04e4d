"""What the user sees and keeps: results file, counterexample, JSON summary, progress, batch table."""
