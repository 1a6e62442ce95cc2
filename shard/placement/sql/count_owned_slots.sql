-- How many slots this shard has been granted, whichever catalog granted them.
SELECT count(*) FROM windrow.owned_slot o
