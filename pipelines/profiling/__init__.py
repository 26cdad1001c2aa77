"""`profile_pipeline`: finds the stage that limits an input pipeline."""
