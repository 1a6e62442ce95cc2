-- How many jobs a portion may release and cancel, and how many nodes it may tell of an end if they have few edges.
CREATE OR REPLACE FUNCTION windrow.fold_room() RETURNS integer LANGUAGE sql STABLE AS 'SELECT 200';
