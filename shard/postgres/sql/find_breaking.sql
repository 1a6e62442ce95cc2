-- Returns the first breaking migration that is newer than this release; NULL if there is none.
SELECT min(m.number) FROM windrow.migration m WHERE m.breaking AND m.number > %(known)s
