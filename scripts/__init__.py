"""The programs. The command `tnn` imports them as `tnn_cli.programs`; nothing else imports one."""
