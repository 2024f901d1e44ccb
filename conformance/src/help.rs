//! The program's help: its commands in groups, by purpose.

use clap::Command;

const GROUPS: [(&str, &[&str]); 5] = [
    ("See it", &["demo", "list", "explain"]),
    ("Test an implementation", &["run", "replay", "report", "doctor"]),
    ("Write an implementation", &["vectors", "reqs", "trace"]),
    ("Try this library's own", &["smoke", "client"]),
    ("Install this program", &["completions", "man"]),
];

/// The end of help and manual page, in lines that neither wraps at 80 columns.
const AFTER: &str = "\
Without a command: the whole suite against this library's own server and client,
over an RDMA fabric inside the process.

Examples:
  valkey-rdma-conformance demo
  valkey-rdma-conformance run server --target 192.0.2.1:6379
  valkey-rdma-conformance run server --select 'mem.*' \\
      --listen 192.0.2.1:6379 \\
      --exec 'your-server --rdma-bind {host} --rdma-port {port}'
  valkey-rdma-conformance vectors check --shim ./your-shim

Exit status:
    0 all as it should be         5 nothing was run
    1 a requirement is not met   64 wrong command line
    2 undecided                  69 no RDMA here
    3 the suite failed           70 a mistake of ours
    4 the target was lost       141 the reader of the output is gone";

pub(crate) fn grouped(command: Command) -> Command {
    let mut template = String::from("{about}\n\n{usage-heading} {usage}\n");
    for (group, names) in GROUPS {
        template += &format!("\n{group}:\n");
        for name in names {
            let about = command.find_subcommand(name).and_then(Command::get_about);
            template += &format!("  {name:11}  {}\n", about.cloned().unwrap_or_default());
        }
    }
    command.help_template(template + "\nOptions:\n{options}{after-help}").after_help(AFTER)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn every_command_is_in_a_group() {
        let command = suite::exit::with_common(crate::Cli::command());
        let mut all: Vec<_> = command.get_subcommands().map(Command::get_name).collect();
        let mut grouped_ones: Vec<_> = GROUPS.iter().flat_map(|(_, names)| *names).copied().collect();
        all.sort_unstable();
        grouped_ones.sort_unstable();
        assert_eq!(all, grouped_ones);
        let help = grouped(command.clone()).term_width(80).render_help().to_string();
        assert!(help.lines().all(|line| line.len() <= 80), "{help}");
        for name in all {
            assert!(help.lines().any(|line| line.starts_with(&format!("  {name} "))), "{name}");
        }
    }
}
