"""How far two sources disagree: log-probs (`mismatch`), routes (`agreement`), and what a plan does to them (`replay`)."""
