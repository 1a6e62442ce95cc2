-- Returns the version of the weights, and all weights by org. If there are no weights, returns one row without an org.
SELECT c.weights_changed, w.org, w.weight FROM windrow.catalog c LEFT JOIN windrow.org_weight w ON true ORDER BY w.org
