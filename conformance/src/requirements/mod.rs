//! The requirements of the protocol: `spec/requirements.toml`, read and listed.

mod command;
mod ids;

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use command::{Command, run};
pub use ids::ids;
pub use suite::Role;

/// The version of the file's format that this program reads.
const FORMAT: u32 = 2;

/// How binding a requirement is, as in RFC 2119.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Without it peers do not work together, or come to harm.
    Must,
    /// There may be reasons against it, to be weighed.
    Should,
    /// A choice, which peers must be able to live with.
    May,
}

/// Where a requirement comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// Valkey's page about RDMA.
    Document,
    /// The RDMA verbs and the connection manager.
    Verbs,
    /// The behaviour of deployed implementations, which a peer must follow.
    Reference,
    /// The defence against peers that err or attack.
    Hardening,
}

/// The purpose of a requirement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Profile {
    /// The wire contract: what two faultless peers need in order to lose no byte and not to wait
    /// for ever.
    Wire,
    /// Everything else: what keeps a peer that errs, attacks, is slow or vanishes from costing more
    /// than its connection.
    Hardened,
}

impl Profile {
    /// All of them, in the order of reports.
    pub const ALL: [Self; 2] = [Self::Wire, Self::Hardened];

    /// Returns its name in reports.
    pub const fn title(self) -> &'static str {
        match self {
            Self::Wire => "wire contract",
            Self::Hardened => "hardening profile",
        }
    }
}

/// One requirement.
#[allow(missing_docs)] // the others are plain
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Requirement {
    /// `VR-<AREA>-<NNN>`.
    pub id: String,
    pub level: Level,
    pub origin: Origin,
    pub profile: Profile,
    pub source: String,
    pub text: String,
    /// Its reason, or a remark.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// The difference between the document and deployed code.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub differs: Option<Difference>,
    /// The roles that it binds.
    #[serde(default = "both")]
    pub roles: Vec<Role>,
    /// Tests and cases that show it without naming it.
    #[serde(default)]
    pub tests: Vec<String>,
    /// The reason for which no test can show it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub untestable: Option<String>,
}

/// A difference between Valkey's page and deployed programs, about a requirement.
#[allow(missing_docs)] // plain fields
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Difference {
    pub document: String,
    pub code: String,
    #[serde(default)]
    pub cases: Vec<String>,
    pub source: String,
}

fn both() -> Vec<Role> {
    vec![Role::Client, Role::Server]
}

impl Requirement {
    /// Returns the middle part of its id.
    pub fn area(&self) -> &str {
        self.id.split('-').nth(1).unwrap_or_default()
    }
}

macro_rules! display_as_in_the_file {
    ($($name:ident)*) => { $(
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&format!("{self:?}").to_lowercase())
            }
        }
    )* };
}

display_as_in_the_file!(Level Origin Profile);

/// All requirements.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Requirements {
    format: u32,
    #[serde(rename = "requirement")]
    all: Vec<Requirement>,
    /// Vectors in the file itself. Others have files of their own.
    #[serde(default, rename = "vector")]
    vectors: Vec<Vector>,
}

#[derive(Clone, Debug, Deserialize)]
struct Vector {
    name: String,
    requirements: Vec<String>,
}

impl Requirements {
    /// Returns the requirements that this program was built with.
    ///
    /// # Panics
    /// If the file that it was built with is broken, which a test excludes.
    pub fn built_in() -> Self {
        Self::parse(include_str!("../../requirements.toml")).unwrap_or_else(|problem| panic!("{problem}"))
    }

    /// Reads the requirements of the workspace at `root`.
    ///
    /// # Errors
    /// Says what is wrong with the file.
    pub fn of(root: &Path) -> Result<Self, String> {
        Self::read(&root.join("spec/requirements.toml"))
    }

    /// Reads a file in the format of `spec/requirements.toml`.
    ///
    /// # Errors
    /// Says what is wrong with the file.
    pub fn read(file: &Path) -> Result<Self, String> {
        let text = std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
        Self::parse(&text).map_err(|problem| format!("{}: {problem}", file.display()))
    }

    fn parse(text: &str) -> Result<Self, String> {
        let parsed: Self = toml::from_str(text).map_err(|error| error.to_string())?;
        if parsed.format != FORMAT {
            return Err(format!("format {}, and this program reads {FORMAT}", parsed.format));
        }
        let mut seen = BTreeSet::new();
        for requirement in &parsed.all {
            let id = &requirement.id;
            if ids(id) != [id.as_str()] {
                return Err(format!("{id} is not an id"));
            }
            if !seen.insert(id) {
                return Err(format!("{id} is there twice"));
            }
        }
        Ok(parsed)
    }

    /// Iterates in the order of the file.
    pub fn iter(&self) -> impl Iterator<Item = &Requirement> {
        self.all.iter()
    }

    /// Returns the vectors in the file, each with its requirements.
    pub fn vectors(&self) -> impl Iterator<Item = (&str, &[String])> {
        self.vectors.iter().map(|vector| (vector.name.as_str(), vector.requirements.as_slice()))
    }

    /// Returns the requirement with this id.
    pub fn get(&self, id: &str) -> Option<&Requirement> {
        self.all.iter().find(|requirement| requirement.id == id)
    }

    /// Returns the level of a case with these requirements: that of the first.
    pub fn level(&self, ids: &[&str]) -> Level {
        let first = ids.first().and_then(|id| self.get(id));
        first.map_or(Level::May, |requirement| requirement.level)
    }

    /// Returns a case's profile: that of its first requirement; [`Profile::Wire`] without any.
    pub fn profile(&self, ids: &[&str]) -> Profile {
        let first = ids.first().and_then(|id| self.get(id));
        first.map_or(Profile::Wire, |requirement| requirement.profile)
    }

    /// Returns whether there is one with this id.
    pub fn has(&self, id: &str) -> bool {
        self.get(id).is_some()
    }

    /// Returns whether the one with this id is a *must*, if it exists.
    pub fn is_must(&self, id: &str) -> Option<bool> {
        self.get(id).map(|requirement| requirement.level == Level::Must)
    }
}

/// Returns the workspace of the current directory.
///
/// # Errors
/// It is in none.
pub fn workspace() -> Result<PathBuf, String> {
    let here = std::env::current_dir().map_err(|error| format!("the current directory: {error}"))?;
    let found = here.ancestors().find(|folder| folder.join("spec/requirements.toml").is_file());
    found.map(Path::to_path_buf).ok_or_else(|| {
        format!("{} is in no workspace with spec/requirements.toml; --root says where one is", here.display())
    })
}
