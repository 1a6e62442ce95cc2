-- Alone with the slots for a moment: no enqueue is under way that found one of them owned, and those that wait will see
-- what is written now. Not to be had at once, it is not waited for: everybody would wait behind.
SET LOCAL lock_timeout = '100ms';
-- Nor do they wait long for one who has it and freezes.
SET LOCAL idle_in_transaction_session_timeout = '2s';
LOCK TABLE windrow.owned_slot IN ACCESS EXCLUSIVE MODE
