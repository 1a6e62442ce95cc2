-- Counts the slots that were granted to this shard, by the cluster's catalog or by another one.
SELECT count(*) FROM windrow.owned_slot o
