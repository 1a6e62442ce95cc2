-- Alone with the slots for a moment: no enqueue is under way that found one of them owned, and those that wait will see
-- what is written now. Not to be had at once, it is not waited for: everybody would wait behind.
SET LOCAL lock_timeout = '100ms';
LOCK TABLE windrow.owned_slot IN ACCESS EXCLUSIVE MODE
