"""A Hydra sweeper on Optuna 5: constraints, preflight, resume. Kept thin: Hydra imports it whenever any app starts."""
