"""What protection costs, measured and predicted, and what shows it: bench, plan, report, demo."""
