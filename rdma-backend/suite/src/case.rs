use std::fmt;

use indicatif::ProgressBar;
use serde::{Deserialize, Serialize};

use crate::verdict::{Judged, Stop, pass};

/// A side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The side that connects.
    Client,
    /// The side that accepts.
    Server,
}

impl Role {
    /// Returns its name as it is written everywhere.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Server => "server",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A property by which cases are selected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tag {
    /// May bring down a target that is not made for it, or degrade it for others.
    Disruptive,
    /// Takes seconds.
    Slow,
    /// Looks at the target's process, which must run here.
    Local,
}

impl Tag {
    /// Returns its name as it is written everywhere.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Disruptive => "disruptive",
            Self::Slow => "slow",
            Self::Local => "local",
        }
    }
}

/// The body of a case, which works on an `S`. The bar is for long ones.
pub type Body<S> = Box<dyn Fn(&S, &ProgressBar) -> Judged + Send + Sync>;

/// A case for an `S`.
pub struct Case<S> {
    /// A stable name, `suite.intent` or `area.intent`; one for each role.
    pub id: &'static str,
    /// The tested side, in a suite with cases for both.
    pub role: Option<Role>,
    /// The case's point, or the behaviour shown to the target, in a few words.
    pub intent: &'static str,
    /// The required reaction of the target; empty if the intent says it all.
    pub expectation: &'static str,
    /// Its requirements, the most important first.
    pub requirements: &'static [&'static str],
    /// Another source, for instance a man page; empty if the requirements suffice.
    pub source: &'static str,
    /// Its tags, for selection.
    pub tags: &'static [Tag],
    /// The case itself.
    pub run: Body<S>,
}

impl<S> Case<S> {
    /// Creates a case whose body returns a remark if it passes, and otherwise the fault.
    pub fn new<F: Into<Stop>>(
        id: &'static str,
        intent: &'static str,
        requirements: &'static [&'static str],
        run: impl Fn(&S, &ProgressBar) -> Result<String, F> + Send + Sync + 'static,
    ) -> Self {
        let run = move |on: &S, progress: &ProgressBar| run(on, progress).map(pass).map_err(Into::into);
        let run = Box::new(run);
        Self { id, role: None, intent, expectation: "", requirements, source: "", tags: &[], run }
    }

    /// Sets the source.
    #[must_use]
    pub fn from_source(self, source: &'static str) -> Self {
        Self { source, ..self }
    }

    /// Sets the tested side.
    #[must_use]
    pub fn of(self, role: Role) -> Self {
        Self { role: Some(role), ..self }
    }

    /// Returns whether it has this tag.
    #[must_use]
    pub fn is(&self, tag: Tag) -> bool {
        self.tags.contains(&tag)
    }

    /// Returns its area: the first part of its id.
    #[must_use]
    pub fn area(&self) -> &'static str {
        self.id.split('.').next().unwrap_or_default()
    }
}
