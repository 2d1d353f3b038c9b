"""Moving messages (ZeroMQ) and weights (collectives) between processes."""
