"""What tests, benchmarks and chaos runs share to attack and observe a cluster. No installed package imports it."""
