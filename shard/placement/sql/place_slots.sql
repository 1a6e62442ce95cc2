-- Places every slot of a new cluster: the n-th shard of the array owns slot n - 1.
INSERT INTO windrow.placement (slot, writes, reads, epoch)
SELECT n.slot - 1, ARRAY[n.shard], ARRAY[n.shard], 1
FROM unnest(%(shards)s::text[]) WITH ORDINALITY AS n (shard, slot)
