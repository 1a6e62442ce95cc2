-- Returns every setting as a new session of this role gets it: its value in its unit, its value as text, who may change
-- it, and where it was set.
SELECT s.name, s.setting, s.unit, current_setting(s.name) AS shown, s.context, s.source FROM pg_settings s
