-- How many slots this shard has been granted, by any catalog.
SELECT count(*) FROM windrow.owned_slot o
