scripts/launch.sh generate --checkpoint "$newest" --prompt "class "
