"""Which machines may be workers: their evidence, the policy, and the broker that judges by it."""
