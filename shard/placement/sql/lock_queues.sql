-- Prevents other sessions from creating or changing queues until the transaction ends. Sessions that have waited then
-- see what this transaction has written about the orgs of their queues. Enqueues do not wait.
SET LOCAL lock_timeout = '100ms';
SET LOCAL idle_in_transaction_session_timeout = '2s';
LOCK TABLE windrow.queue IN SHARE ROW EXCLUSIVE MODE
