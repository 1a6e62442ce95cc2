-- Prevents other sessions from creating or changing queues until the transaction ends. Sessions that waited then see
-- their orgs as this transaction has left them. Enqueues go on.
SET LOCAL lock_timeout = '100ms';
SET LOCAL idle_in_transaction_session_timeout = '2s';
LOCK TABLE windrow.queue IN SHARE ROW EXCLUSIVE MODE
