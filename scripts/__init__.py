"""The programs. The command `tnn` imports them as `tnn_programs`; nothing else imports one."""
