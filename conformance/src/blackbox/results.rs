//! The results of a run, as stored in a file.

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::environment::Environment;
use super::hints;
use crate::exit;
use crate::requirements::{Level, Profile, Role};
use intercept::trace::timeline;
use suite::{Cause, Tag, Verdict};

/// The version of the files' format.
pub const FORMAT: u32 = 2;

/// A run of the suite against one target.
#[allow(missing_docs)] // plain fields
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Run {
    pub format: u32,
    pub target: Target,
    pub suite: Suite,
    /// The command line, after the program's name.
    pub arguments: Vec<String>,
    /// Seconds since 1970 at the start.
    pub begun: u64,
    /// Its duration in seconds.
    pub took: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub environment: Option<Environment>,
    pub results: Vec<CaseResult>,
    /// Cases that are counted here, and not listed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub withheld: Option<Withheld>,
}

/// How the case's connection ended, the best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Teardown {
    /// With a disconnect that the other side answered.
    Clean,
    /// Without one: its queue pair failed, or the disconnect was never answered.
    Unclean,
    /// The target disconnected without a reason.
    WrongSide,
    /// The target still holds resources of the connection.
    Leaked,
    /// The target's process ended.
    Crashed,
}

impl Teardown {
    /// Returns the name that is used in files and output.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Clean => "clean",
            Self::Unclean => "unclean",
            Self::WrongSide => "wrong-side",
            Self::Leaked => "leaked",
            Self::Crashed => "crashed",
        }
    }
}

/// The numbers of withheld cases in a published run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Withheld {
    /// The cases that brought the target down or harmed others.
    pub harmed: Count,
    /// The cases that passed, if any did harm: a list of them would reveal the others. Otherwise
    /// those that may do harm.
    pub passed: Count,
    /// Undecided cases that may do harm, and those not run because the target was gone: the first
    /// of them follows the case that ended it.
    #[serde(default)]
    pub untried: Count,
    /// The reason for which the harm was expected, if all of it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected: Option<String>,
}

/// A number of cases of each profile.
#[allow(missing_docs)] // the profiles
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Count {
    pub wire: usize,
    pub hardened: usize,
}

impl Count {
    fn of<'a>(results: impl Iterator<Item = &'a CaseResult>) -> Self {
        results.fold(Self::default(), |count, result| match result.profile {
            Profile::Wire => Self { wire: count.wire + 1, ..count },
            Profile::Hardened => Self { hardened: count.hardened + 1, ..count },
        })
    }

    /// Returns the number of one profile.
    pub const fn with(self, profile: Profile) -> usize {
        match profile {
            Profile::Wire => self.wire,
            Profile::Hardened => self.hardened,
        }
    }

    /// Returns the number of both profiles.
    pub const fn total(self) -> usize {
        self.wire + self.hardened
    }
}

/// How many cases of a profile passed, among the decided ones.
#[allow(missing_docs)] // plain fields
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Score {
    pub profile: Profile,
    pub passed: usize,
    /// Cases that passed or failed.
    pub decided: usize,
}

impl fmt::Display for Score {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} of {}", self.profile.title(), self.passed, self.decided)
    }
}

/// The target.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Target {
    /// Its name and version, as given on the command line.
    pub name: String,
    /// The tested side.
    pub role: Role,
    /// How it was reached or started.
    pub how: String,
    /// The backend: `softsim`, or a device's address.
    pub backend: String,
}

/// The suite.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Suite {
    /// The version of this program.
    pub version: String,
    /// The number of its requirements.
    pub requirements: usize,
}

/// The result of one case.
#[allow(missing_docs)] // plain fields
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CaseResult {
    pub id: String,
    pub intent: String,
    pub expectation: String,
    pub requirements: Vec<String>,
    /// The level of the first of them.
    pub level: Level,
    /// The purpose of the first of them.
    pub profile: Profile,
    pub tags: Vec<String>,
    pub verdict: Verdict,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub teardown: Option<Teardown>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<Cause>,
    pub reason: String,
    /// An observation on the wire that may explain the failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// Why the failure was expected, if it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected: Option<String>,
    /// In seconds.
    pub took: f64,
    /// The command that repeats it.
    pub repro: String,
    /// The work requests and messages of the connection, as text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeline: Option<String>,
}

impl Run {
    /// Returns the number of cases with this verdict.
    pub fn count(&self, verdict: Verdict) -> usize {
        let withheld = self.withheld.as_ref().map_or(0, |withheld| match verdict {
            Verdict::Pass => withheld.passed.total(),
            Verdict::Skipped => withheld.untried.total(),
            _ => 0,
        });
        self.results.iter().filter(|result| result.verdict == verdict).count() + withheld
    }

    /// Returns the number of unlisted cases that brought the target down or harmed others.
    pub fn withheld(&self) -> usize {
        self.withheld.as_ref().map_or(0, |withheld| withheld.harmed.total())
    }

    /// Returns a page's words about cases that it does not list.
    pub fn says_of_withheld(&self) -> Option<&'static str> {
        self.withheld.as_ref().map(|withheld| {
            if withheld.harmed.total() == 0 {
                "Cases that may bring a program down or harm others are counted, and not listed."
            } else {
                "Withheld are cases that bring the program down, keep it from serving, or harm others on it, until a release mends \
                 that, and what else failed of those that may. They and those that passed are counted, and not listed."
            }
        })
    }

    /// Returns the words about withheld cases that nothing excuses: the run has failed then.
    pub fn unexcused(&self) -> Option<String> {
        let excused = |withheld: &Withheld| withheld.harmed.total() == 0 || withheld.expected.is_some();
        self.withheld.as_ref().filter(|withheld| !excused(withheld))?;
        Some(format!("{} cases withheld: they bring the target down or harm others", self.withheld()))
    }

    /// Removes everything that could reveal which cases brought the target down or harmed others.
    /// Cases that may do so are never listed, even if they passed: a missing one reveals nothing.
    pub fn withhold(&mut self) {
        let is_harmed = self.results.iter().any(CaseResult::is_harm);
        let passed = |result: &CaseResult| {
            result.verdict == Verdict::Pass && (is_harmed || result.may_harm()) && !result.is_harm()
        };
        let untried = |result: &CaseResult| {
            is_harmed && result.is_behind_a_loss()
                || result.may_harm() && !result.is_kept_back() && !passed(result)
        };
        let count =
            |test: &dyn Fn(&CaseResult) -> bool| Count::of(self.results.iter().filter(|result| test(result)));
        let harmed = self.results.iter().filter(|result| result.is_kept_back());
        let expected = harmed.map(|result| result.expected.clone()).collect::<Option<Vec<_>>>();
        let withheld = Withheld {
            harmed: count(&CaseResult::is_kept_back),
            passed: count(&passed),
            untried: count(&untried),
            expected: expected.and_then(|reasons| reasons.into_iter().next()),
        };
        let listed = |result: &CaseResult| !result.is_kept_back() && !passed(result) && !untried(result);
        if self.results.iter().all(listed) {
            return;
        }
        self.results.retain(listed);
        self.withheld = Some(withheld);
        // The command line would name the case of a run of one case.
        self.arguments = without(&self.arguments, &["--select", "--skip"]);
    }

    /// Returns its counts in one line.
    pub fn summary(&self) -> String {
        let counts: Vec<String> = Verdict::ALL
            .into_iter()
            .map(|verdict| (self.count(verdict), verdict))
            .filter(|(count, _)| *count > 0)
            .map(|(count, verdict)| format!("{count} {verdict}"))
            .collect();
        let counts = match self.withheld() {
            0 => counts,
            withheld => [counts, vec![format!("{withheld} cases withheld")]].concat(),
        };
        let expected = self.results.iter().filter(|result| result.expected.is_some()).count();
        let expected = if expected > 0 { format!(" ({expected} as expected)") } else { String::new() };
        format!("{}{expected}, {:.1} s", counts.join(", "), self.took)
    }

    /// Returns the score of each profile, the wire contract first. Includes withheld cases.
    pub fn scores(&self) -> [Score; 2] {
        let withheld = self.withheld.as_ref();
        Profile::ALL.map(|profile| {
            let of = |test: fn(Verdict) -> bool| {
                let results = self.results.iter().filter(|result| test(result.verdict));
                Count::of(results).with(profile)
            };
            let passed = of(Verdict::is_pass) + withheld.map_or(0, |them| them.passed.with(profile));
            let failed =
                of(|verdict| verdict == Verdict::Fail) + withheld.map_or(0, |them| them.harmed.with(profile));
            Score { profile, passed, decided: passed + failed }
        })
    }

    /// Returns the results of one profile.
    pub fn of(&self, profile: Profile) -> impl Iterator<Item = &CaseResult> {
        self.results.iter().filter(move |result| result.profile == profile)
    }

    /// Returns whether it was interrupted.
    pub fn is_interrupted(&self) -> bool {
        self.results.iter().any(|result| result.reason == INTERRUPTED)
    }

    /// Returns the exit code of the run.
    pub fn code(&self, strict: bool) -> u8 {
        let any = |test: &dyn Fn(&CaseResult) -> bool| self.results.iter().any(test);
        let tried = self.results.iter().filter(|result| result.verdict != Verdict::Skipped).count();
        let skipped = self.count(Verdict::Skipped);
        if self.unexcused().is_some()
            || any(&|result| result.is_scored_failure(strict) && result.cause.is_some_and(Cause::is_loss))
        {
            exit::LOST
        } else if any(&|result| result.is_scored_failure(strict)) {
            exit::FAILED
        } else if any(&|result| result.verdict == Verdict::Broken) {
            exit::BROKEN
        } else if any(&|result| result.verdict == Verdict::Inconclusive && result.expected.is_none()) {
            exit::UNDECIDED
        } else if tried == 0 && self.withheld.is_none() {
            exit::NOTHING
        } else if strict && skipped > 0 {
            exit::UNDECIDED
        } else {
            exit::DONE
        }
    }

    /// Reads a file.
    ///
    /// # Errors
    /// It is not a file of results.
    pub fn read(file: &Path) -> Result<Self, String> {
        let told = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
        let text = std::fs::read_to_string(file).map_err(|error| told(&error))?;
        // Read before the rest, which differs in another format.
        #[derive(Deserialize)]
        struct Head {
            format: u32,
        }
        let Head { format } = serde_json::from_str(&text).map_err(|error| told(&error))?;
        if format != FORMAT {
            return Err(told(&format!("format {format} is none that this program reads ({FORMAT})")));
        }
        serde_json::from_str(&text).map_err(|error| told(&error))
    }

    /// Returns the text of the file.
    ///
    /// # Errors
    /// None is known.
    pub fn json(&self) -> Result<String, String> {
        serde_json::to_string_pretty(self).map(|text| text + "\n").map_err(|error| error.to_string())
    }
}

pub(super) fn without(arguments: &[String], options: &[&str]) -> Vec<String> {
    let mut left = Vec::new();
    let mut rest = arguments.iter().peekable();
    while let Some(word) = rest.next() {
        let (name, value) =
            word.split_once('=').map_or((word.as_str(), None), |(name, value)| (name, Some(value)));
        if !options.contains(&name) {
            left.push(word.clone());
        } else if value.is_none() {
            rest.next_if(|value| !value.starts_with("--"));
        }
    }
    left
}

/// Begins the reason of a case not run because the target was gone; the case that ended it follows.
pub(super) const GONE_SINCE: &str = "the target is gone since ";

/// Begins the reason of a case not run because the first one failed; the cause follows.
pub(super) const UNPROBED: &str = "conn.plain failed: ";

pub(super) const INTERRUPTED: &str = "the run was interrupted";

/// Lines of a timeline that are shown if there is no room for all of it.
const LAST_LINES: usize = 6;

impl CaseResult {
    /// Returns the reason, with the hint if there is one.
    pub fn why(&self) -> String {
        match &self.hint {
            None => self.reason.clone(),
            Some(hint) => format!("{} (hint: {hint})", self.reason),
        }
    }

    /// Returns the common part of failures of one cause.
    pub fn cause_in_words(&self) -> String {
        let hint = self.hint.as_deref().filter(|hint| !hints::is_about_the_place(hint));
        hints::cause(hint.unwrap_or(&self.reason))
    }

    /// Returns the last events on the wire before the case was given up.
    pub fn last_on_the_wire(&self) -> Vec<String> {
        self.timeline.as_deref().map(|pages| timeline::last(pages, LAST_LINES)).unwrap_or_default()
    }

    /// Returns whether more than the case's own connection was harmed.
    pub fn is_harm(&self) -> bool {
        !self.verdict.is_pass() && self.cause.is_some_and(Cause::is_harm)
            || self.teardown == Some(Teardown::Crashed)
    }

    fn may_harm(&self) -> bool {
        self.tags.iter().any(|tag| tag == Tag::Disruptive.name())
    }

    /// Returns whether it is counted but not named when harm is withheld: harm, and other failures
    /// of a case that may do harm. A list of the harmless ones would reveal the others.
    pub fn is_kept_back(&self) -> bool {
        self.is_harm() || self.verdict == Verdict::Fail && self.may_harm()
    }

    /// Returns whether it was not run because the target was gone.
    pub fn is_behind_a_loss(&self) -> bool {
        self.verdict == Verdict::Skipped
            && [GONE_SINCE, UNPROBED].iter().any(|why| self.reason.starts_with(why))
    }

    /// Returns why a failure does not count: it was expected, or its requirement is not binding.
    pub fn excuse(&self) -> Option<String> {
        match &self.expected {
            Some(reason) => Some(format!("expected ({reason})")),
            None if self.verdict == Verdict::Fail => Some(format!("not counted ({})", self.level)),
            None => None,
        }
    }

    /// Returns whether it counts as a failure in the exit code and in reports for programs.
    pub fn is_told_as_failure(&self, strict: bool) -> bool {
        self.is_scored_failure(strict) || self.verdict == Verdict::Broken
    }

    /// Returns whether it is a failure that counts. Harm counts at any level of the requirement.
    pub fn is_scored_failure(&self, strict: bool) -> bool {
        let harm = self.cause.is_some_and(Cause::is_harm);
        self.expected.is_none()
            && match self.verdict {
                Verdict::Fail => strict || self.level == Level::Must || harm,
                Verdict::PassLenient => strict,
                _ => false,
            }
    }
}
