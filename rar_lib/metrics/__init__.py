"""How far two sources disagree: log-probs (`mismatch`) and routes (`agreement`)."""
