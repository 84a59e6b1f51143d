"""Who computes: rollouts and trainers behind two small interfaces, imported when they are asked for."""
