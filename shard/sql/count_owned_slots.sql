-- How many slots this shard has been granted, by whichever catalog.
SELECT count(*) FROM windrow.owned_slot o
