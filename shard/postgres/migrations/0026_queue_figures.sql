-- How many jobs each queue has, as they were counted last for the metrics of routers: one row, which all routers share
-- (docs/decisions/0071-metrics-name-the-largest-queues.md).
CREATE TABLE windrow.queue_figures (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    at timestamptz NOT NULL DEFAULT '-infinity',
    -- The figures of the largest queues, by their ids: names would outlive an erased org. The last element has the sums of
    -- all others.
    figures jsonb NOT NULL DEFAULT '[]'
);
INSERT INTO windrow.queue_figures DEFAULT VALUES;
