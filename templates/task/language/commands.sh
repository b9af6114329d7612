scripts/launch.sh generate --checkpoint runs/default --prompt "class "
