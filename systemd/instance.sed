# Turns a unit into its template: `sed -f instance.sed sealaned.service > sealaned@.service`. Instance
# NAME reads /etc/sealane/NAME.toml, and has directories and credentials of its own.
/^Description=/s/$/ (%i)/
s|/etc/sealane/sealaned\.toml|/etc/sealane/%i.toml|
s#^\(State\|Runtime\)Directory=sealane$#&-%i#
/^\(ConditionPathExists\|RequiresMountsFor\)=/s|/var/lib/sealane|&-%i|
s|^LoadCredential=sealane\.|&%i.|
s|sealaned\(-setup\)\?\.service|sealaned\1@%i.service|g
