#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};
use rdma_conn::{Options, SETTINGS, Setting};

/// The options of all RDMA connections of a program that a network or a card may want: those of
/// [`SETTINGS`].
#[derive(Clone, Debug, Default)]
pub struct Network {
    given: Vec<(&'static Setting, String)>,
}

impl Network {
    /// Returns `options`, changed by the command line.
    #[must_use]
    pub fn on(&self, mut options: Options) -> Options {
        for (setting, value) in &self.given {
            // The parser has tried it.
            let valid = setting.set(&mut options, value);
            debug_assert!(valid.is_ok(), "{setting:?}");
        }
        options
    }
}

impl Args for Network {
    fn augment_args(command: Command) -> Command {
        SETTINGS.iter().fold(command.next_help_heading("RDMA networks and cards"), |command, setting| {
            let tried = |value: &str| setting.set(&mut Options::default(), value).map(|()| value.to_owned());
            let arg = Arg::new(setting.name)
                .long(setting.name.replace('_', "-"))
                .value_name(setting.values)
                .help(setting.help)
                .value_parser(tried);
            let switch = |arg: Arg| arg.num_args(0..=1).require_equals(true).default_missing_value("yes");
            command.arg(if setting.is_switch() { switch(arg) } else { arg })
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Network {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut network = Self::default();
        network.update_from_arg_matches(matches)?;
        Ok(network)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        let values =
            |setting: &'static Setting| Some((setting, matches.get_one::<String>(setting.name)?.clone()));
        self.given.extend(SETTINGS.iter().filter_map(values));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Arguments {
        #[command(flatten)]
        network: Network,
    }

    fn options(line: &[&str]) -> Result<Options, clap::Error> {
        let arguments = Arguments::try_parse_from([&["program"], line].concat())?;
        Ok(arguments.network.on(Options::default()))
    }

    #[test]
    fn the_line_says_what_is_set() {
        assert_eq!(options(&[]).expect("needs none"), Options::default());
        let all = ["--traffic-class", "104", "--ack-timeout", "16", "--relaxed-ordering", "--huge-pages=yes"];
        let expected = Options::default().traffic_class(Some(104)).ack_timeout(Some(16));
        let expected = expected.relaxed_ordering(true).huge_pages(true);
        assert_eq!(options(&all).expect("is well formed"), expected);
    }

    #[test]
    fn what_no_network_has_is_refused() {
        for line in [&["--traffic-class", "256"][..], &["--ack-timeout", "32"], &["--huge-pages=maybe"]] {
            assert!(options(line).is_err(), "{line:?}");
        }
    }
}
