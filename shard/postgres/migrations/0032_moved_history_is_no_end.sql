-- A finished job whose retention changes moves to another partition. For Postgres that is a DELETE and an INSERT, so the
-- triggers of `finished` took the job for one that has just ended. Its end was appended once more and, if its slot has
-- moved to another shard, stayed for ever.

-- It passes over rows that only move (keep_finished.sql).
-- INSTALL functions/note_end.sql 7682e62f9cda6d1afc61fa1cc09006c301e07559e988e604dccbf747396e7342

-- What two other functions said twice.
-- INSTALL functions/kept_days.sql 1bf30986a50e28defa76a322525f17caba2f9095f27335a4ea3702ce54fa9ce4
-- INSTALL functions/finish_time.sql 4201a9c746656bc815c9727dbd48bfb0548f10458da7ec8b50cdfdc202e3604e
-- INSTALL functions/cancel_blocked.sql 554c30048369de7611947918b28c3532f613da8ac7fc63bce0c518403130e04b
-- INSTALL functions/succeed_signalled.sql 4b24fb8e4d6a5c7a274741e9511020f06fdcd8e8ca37a4173968c280afd988a3
