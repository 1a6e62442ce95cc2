"""The queue of one shard: enqueue, claim, ack, nack, extend, release."""
