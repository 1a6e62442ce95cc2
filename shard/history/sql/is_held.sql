-- Whether this org is under legal hold here.
SELECT FROM windrow.org o WHERE o.org = %(org)s AND o.held
