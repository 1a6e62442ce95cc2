-- An enqueue finds the slots of all its groups at once, not row by row
-- (docs/decisions/0047-a-slot-of-a-group-is-a-column-of-the-job.md).
DROP FUNCTION windrow.await_group_slots;
-- INSTALL functions/slots_of_groups.sql 46df7d8e42ab321383a361de5eaa7ad34d851b3d3bca14f2ffeb9367466701a8
-- INSTALL functions/take_group_slots.sql 62268fc152538acbc6a36a21cb1b175866a7f3047ed5631be6aa089e1ea9153e
-- INSTALL functions/wait_for_slot.sql cc48d8404c1efc5e1cb9a7616526cd6c3ae8a8fa1b70f82503e9f95578049948
-- INSTALL functions/lock_groups.sql fff9b818344412fd95ce775c1eebfcf0df852bda4c4daed248c30d3f642b9f01
-- INSTALL functions/fill_group_slots.sql d6788030054f2eabec5c32b30b8d6ff84209b92b74e3a8a261eb6fc3fe8920b4
-- INSTALL functions/fill_noted_groups.sql bec9666acd97e24418882fe904b5bb70b6f70fa9f971da45b47064b4d425aaf8
