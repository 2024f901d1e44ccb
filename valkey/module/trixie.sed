# What the patches of Debian's 8.1.1+dfsg1-3+deb13u3 (trixie) add to src/server.h, for when the archive has upstream's sources without them. If a later package
# adds more, the module refuses that server.
s/^    int script_disable_deny_script;.*/&\n    int lua_enable_insecure_api, lua_insecure_api_current;/
