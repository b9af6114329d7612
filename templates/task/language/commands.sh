scripts/launch.sh generate --checkpoint runs/default/checkpoints/{{ fact("last_checkpoint") }} --prompt "class "
