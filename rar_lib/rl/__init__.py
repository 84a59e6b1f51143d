"""How to learn: advantages, objectives and corrections, one small file each."""
