use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Args, Parser, Subcommand, ValueEnum};
use rdma_conn::Options;

use super::{CommandError, pair, usage};
use crate::blackbox::builtin::small;
use crate::blackbox::report::Format;
use crate::blackbox::results::{Target, without};
use crate::blackbox::select::{Harm, Select};
use crate::requirements::Role;
use intercept::mistakes::Mistake;

/// As many random peers as `--minutes` allows.
const MOST_RANDOM: &str = "100000";

/// The target.
#[derive(Subcommand, Clone, Debug)]
pub enum TargetCommand {
    /// A server: the suite connects to it.
    Server(ServerRun),
    /// A client: it connects to the suite.
    Client(ClientRun),
    /// A client and a server with each other, and the suite in between, which watches both.
    Pair(pair::PairRun),
}

/// The backend of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Backend {
    /// The RDMA device of this machine.
    Verbs,
    /// The fabric inside this process, with this library's own side as the target.
    Softsim,
}

/// A server under test.
#[derive(Args, Clone, Debug)]
pub struct ServerRun {
    /// It listens there already (HOST:PORT).
    #[arg(long, conflicts_with_all = ["exec", "listen"])]
    pub(super) target: Option<String>,
    /// Shell command that starts it, with {host} and {port} for where it shall listen. It is
    /// started again when it has died.
    #[arg(long, requires = "listen")]
    pub(super) exec: Option<String>,
    #[command(flatten)]
    pub(super) common: Common,
}

/// A client under test.
#[derive(Args, Clone, Debug)]
pub struct ClientRun {
    /// Shell command that starts the client, which connects to {host} and {port}. It runs once for
    /// each case. docs/adopt.md says what the client should do.
    #[arg(long, requires = "listen", conflicts_with = "wait")]
    pub(super) exec: Option<String>,
    /// Connections that the command makes before the one that counts. They are served correctly.
    #[arg(long, default_value_t = 0, requires = "exec")]
    pub(super) first: u32,
    /// Wait for a client that you start yourself and that reconnects.
    #[arg(long, requires = "listen")]
    pub(super) wait: bool,
    #[command(flatten)]
    pub(super) common: Common,
}

/// Options of every kind of run.
#[derive(Args, Clone, Debug)]
pub(super) struct Common {
    /// An address of this machine's RDMA device (ADDRESS:PORT): where a target that is started here
    /// shall listen, or where the suite waits for clients.
    #[arg(long)]
    pub(super) listen: Option<SocketAddr>,
    /// The backend; a device, unless neither a target nor an address is given.
    #[arg(long, value_enum)]
    backend: Option<Backend>,
    /// The name and version of what is tested, for the reports.
    #[arg(long)]
    name: Option<String>,
    #[command(flatten)]
    pub(super) select: Select,
    /// Instead of the cases: this many peers that do anything the specification allows, drawn at
    /// random; without a number, as many as --minutes allows.
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = MOST_RANDOM,
          value_parser = clap::value_parser!(u64).range(1..=1_000_000),
          conflicts_with_all = ["select", "skip", "quick", "level", "profile"])]
    pub(super) random: Option<u64>,
    /// Minutes after which no further of these peers begins.
    #[arg(long, value_name = "M", requires = "random")]
    pub(super) minutes: Option<f64>,
    /// Each of these peers makes at most D random choices; later ones take the plainest value. With
    /// --minutes, the first failure says how few suffice.
    #[arg(long, value_name = "D", requires = "random")]
    pub(super) draws: Option<u64>,
    /// The first of these peers; each of the others has the number after it.
    #[arg(long, value_name = "S", default_value_t = 0, requires = "random")]
    pub(super) seed: u64,
    /// Also run cases that may bring the target down. Say it twice for a target on another machine.
    #[arg(long, action = clap::ArgAction::Count)]
    allow_disruptive: u8,
    /// Seconds that the target may take for anything that must happen.
    #[arg(long, default_value_t = 5.0)]
    patience: f64,
    /// A file of expected failures, each with its reason. They must still fail.
    #[arg(long)]
    pub(super) baseline: Option<PathBuf>,
    /// Write what fails now into this file, as a baseline for later runs; reasons of --baseline are
    /// kept. This run itself is judged without it.
    #[arg(long, value_name = "FILE")]
    pub(super) write_baseline: Option<PathBuf>,
    /// Without a target: this library's own side makes this mistake, to show what a failure looks
    /// like. Any wrong name lists the mistakes there are.
    #[arg(long, value_enum, value_name = "MISTAKE", hide_possible_values = true)]
    demo_mistake: Option<Mistake>,
    /// Take a failure of what should be, and what is only tolerated, for a failure.
    #[arg(long)]
    pub(super) strict: bool,
    /// The amount of output.
    #[arg(long, value_enum, default_value = "pretty")]
    pub(super) format: Format,
    /// A directory for results.json, junit.xml, results.tap, badge.json and report.html.
    #[arg(long)]
    pub(super) out: Option<PathBuf>,
}

/// Rejects a command of which only a part would run: it is started with `exec`.
pub(super) fn one_command(command: &str) -> Result<(), CommandError> {
    let mut quote = None;
    let mut before = ' ';
    let mut letters = command.trim().chars().peekable();
    while let Some(letter) = letters.next() {
        match (quote, letter) {
            (None | Some('"'), '\\') => drop(letters.next()),
            (None, '\'' | '"') => quote = Some(letter),
            (Some(open), _) if open == letter => quote = None,
            // Part of a redirection: 2>&1, &>file.
            (None, '&') if before == '>' || letters.peek() == Some(&'>') => {}
            (None, ';' | '\n' | '&') | (None, '|') if letter != '|' || letters.peek() == Some(&'|') => {
                return Err(usage(format!(
                    "of `{command}` only what stands before `{letter}` would run: put it all into a script, or into sh -c '…'"
                )));
            }
            _ => {}
        }
        before = letter;
    }
    Ok(())
}

pub(super) fn parse(arguments: &[String]) -> Result<TargetCommand, String> {
    #[derive(Parser)]
    #[command(no_binary_name = true)]
    struct Line {
        #[command(subcommand)]
        command: Only,
    }
    #[derive(Subcommand)]
    enum Only {
        Run {
            #[command(subcommand)]
            who: TargetCommand,
        },
    }
    let Line { command: Only::Run { who } } =
        Line::try_parse_from(arguments).map_err(|error| error.to_string())?;
    Ok(who)
}

impl Common {
    pub(super) fn patience(&self) -> Result<Duration, CommandError> {
        Duration::try_from_secs_f64(self.patience)
            .ok()
            .filter(|patience| !patience.is_zero())
            .ok_or_else(|| usage("--patience wants a number of seconds above 0"))
    }

    /// Returns when no further random peer begins.
    pub(super) fn until(&self) -> Result<Option<Instant>, CommandError> {
        let wrong = || usage("--minutes wants a number above 0");
        let minutes = self.minutes.map(|minutes| Duration::try_from_secs_f64(60.0 * minutes)).transpose();
        let minutes = minutes.map_err(|_| wrong())?.filter(|minutes| !minutes.is_zero());
        if self.minutes.is_some() && minutes.is_none() {
            return Err(wrong());
        }
        Ok(minutes.and_then(|minutes| Instant::now().checked_add(minutes)))
    }

    pub(super) fn harm(&self, local: bool) -> Result<Harm, CommandError> {
        match self.allow_disruptive {
            0 => Ok(Harm::None),
            1 if !local => Err(usage(
                "the target is on another machine, which disruptive cases may harm; say --allow-disruptive twice to mean it",
            )),
            _ => Ok(Harm::Allowed),
        }
    }

    pub(super) fn on_softsim(&self, has_target: bool) -> Result<bool, CommandError> {
        match self.backend {
            Some(Backend::Softsim) if has_target || self.listen.is_some() => Err(usage(
                "on softsim the target is this library's own side; a target or an address needs --backend verbs",
            )),
            Some(Backend::Verbs) if !has_target && self.listen.is_none() => {
                Err(usage("on a device, --target, or --listen with an address of it, is needed"))
            }
            Some(backend) => Ok(backend == Backend::Softsim),
            None => Ok(!has_target && self.listen.is_none()),
        }
        .and_then(|softsim| match self.demo_mistake {
            Some(_) if !softsim => {
                Err(usage("--demo-mistake is of this library's own side on softsim, and goes with no target or address"))
            }
            _ => Ok(softsim),
        })
    }

    pub(super) fn own(&self, options: Options) -> (Option<Mistake>, Options) {
        let mut options = small(options);
        if let Some(mistake) = self.demo_mistake {
            mistake.disturb(&mut options);
        }
        (self.demo_mistake, options)
    }

    pub(super) fn target(&self, role: Role, own: bool, how: &str, backend: &str) -> Target {
        let name = match &self.name {
            Some(name) => name.clone(),
            None if own => {
                let version = concat!("valkey-rdma ", env!("CARGO_PKG_VERSION"));
                let mistake = self.demo_mistake.and_then(|mistake| mistake.to_possible_value());
                mistake.map_or(version.into(), |mistake| format!("{version} with {}", mistake.get_name()))
            }
            None => how.into(),
        };
        Target { name, role, how: how.into(), backend: backend.into() }
    }
}

/// Returns the command that repeats the run, without any selection.
pub(super) fn again(arguments: &[String]) -> String {
    const LEFT_OUT: [&str; 10] = [
        "--select",
        "--skip",
        "--random",
        "--seed",
        "--minutes",
        "--draws",
        "--out",
        "--format",
        "--baseline",
        "--write-baseline",
    ];
    let mut words = vec!["valkey-rdma-conformance".to_string()];
    for word in without(arguments, &LEFT_OUT) {
        match word.as_str() {
            "--quick" => {}
            plain if plain.chars().all(|one| one.is_ascii_alphanumeric() || "-_.:/[]=".contains(one)) => {
                words.push(word);
            }
            _ => words.push(format!("'{}'", word.replace('\'', r"'\''"))),
        }
    }
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::one_command;

    #[test]
    fn a_command_that_would_run_in_part_is_refused() {
        for whole in [
            "server --port {port}",
            "server 2>&1",
            "server &>log",
            "sh -c 'a; b && c'",
            "server \"a;b\" --password \\;",
            "server | tee log",
        ] {
            assert!(one_command(whole).is_ok(), "{whole}");
        }
        for part in ["a; b", "a && b", "a || b", "a &", "cd x\nb", "export A='1'; b"] {
            let (_, told) = one_command(part).expect_err(part);
            assert!(told.contains(part), "{told}");
        }
    }
}
