-- When consumers were last seen that take jobs of a queue (shard/queue/consumers_seen.py). ExplainJob and ExplainQueue
-- read it, and nothing else does. It is a hint (I7). UNLOGGED: after a crash or a failover the table is empty, and
-- consumers that are there are recorded again within a minute. A row does not move with its slot: consumers are recorded
-- on the shard that the slot moves to, as soon as they look for jobs there.
CREATE UNLOGGED TABLE windrow.consumer_seen (
    -- No foreign key: it would lock the queue's row. The erasure of an org deletes its rows.
    queue_id bigint NOT NULL,
    -- Empty: a consumer that takes all kinds, or has not said which.
    kind text COLLATE "C" NOT NULL,
    at timestamptz NOT NULL,
    PRIMARY KEY (queue_id, kind)
);
