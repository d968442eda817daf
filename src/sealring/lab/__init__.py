"""Measures, predicts and shows what protection costs: bench, plan, report, demo."""
