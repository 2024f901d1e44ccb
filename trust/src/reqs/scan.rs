//! Requirement ids in the workspace's Rust sources: beside code, and in the comments of tests.

use std::collections::BTreeSet;
use std::path::Path;

use conformance::requirements::ids;

/// A place that names a requirement.
#[allow(missing_docs)] // plain fields
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mention {
    pub id: String,
    pub kind: MentionKind,
    /// `file:line`.
    pub at: String,
}

/// The kind of place that names a requirement.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MentionKind {
    /// The code that meets it.
    Code,
    /// A test: `file.rs::function`, or `file.rs` if all of the file is about it.
    Test(String),
    /// A table of cases, which is read where it is code; see [`cases`](super::cases).
    Table,
}

/// The mentions of requirements in the sources.
#[derive(Debug, Default)]
pub struct Sources {
    /// Every id, where it is.
    pub mentions: Vec<Mention>,
    /// Every test function as `file.rs::function`.
    pub tests: BTreeSet<String>,
}

impl Sources {
    /// Reads all Rust sources below `root`.
    ///
    /// # Errors
    /// A folder or file cannot be read.
    pub fn read(root: &Path) -> std::io::Result<Self> {
        let mut sources = Self::default();
        sources.read_folder(root, "")?;
        sources.mentions.sort();
        Ok(sources)
    }

    fn read_folder(&mut self, folder: &Path, path: &str) -> std::io::Result<()> {
        for entry in std::fs::read_dir(folder)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let path = if path.is_empty() { name.clone() } else { format!("{path}/{name}") };
            if entry.file_type()?.is_dir() {
                // These have no sources of the workspace.
                if !name.starts_with('.') && name != "target" {
                    self.read_folder(&entry.path(), &path)?;
                }
            } else if name.ends_with(".rs") {
                self.read_file(&path, &std::fs::read_to_string(entry.path())?);
            }
        }
        Ok(())
    }

    fn read_file(&mut self, path: &str, text: &str) {
        let lines: Vec<&str> = text.lines().collect();
        let functions = functions(&lines);
        for function in functions.iter().filter(|function| function.is_test) {
            self.tests.insert(format!("{path}::{}", function.name));
        }
        let has_tables = ["conformance", "trust", "rdma-backend/semantics"]
            .iter()
            .any(|one| path.strip_prefix(one).is_some_and(|rest| rest.starts_with("/src/")));
        let kind = |of: Option<&Function<'_>>| match of.filter(|function| function.is_test) {
            Some(function) => MentionKind::Test(format!("{path}::{}", function.name)),
            None => MentionKind::Code,
        };
        for (number, line) in lines.iter().enumerate() {
            let comment = line.split_once("//").map(|(_, comment)| comment);
            let kind = match comment {
                Some(comment) if comment.starts_with('!') && is_of_tests(path) => {
                    MentionKind::Test(path.to_string())
                }
                // A comment behind code is about that code.
                Some(_) if !line.trim_start().starts_with("//") => MentionKind::Code,
                // A comment is about the function that follows; code belongs to the one around it.
                Some(_) => kind(functions.iter().find(|function| function.line > number)),
                None if has_tables => MentionKind::Table,
                None => kind(functions.iter().rfind(|function| function.line < number)),
            };
            let at = || format!("{path}:{}", number + 1);
            let mention = |id| Mention { id, kind: kind.clone(), at: at() };
            self.mentions.extend(ids(line).into_iter().map(mention));
        }
    }
}

fn is_of_tests(path: &str) -> bool {
    path.split('/').any(|part| part == "tests" || part == "tests.rs")
}

struct Function<'a> {
    name: &'a str,
    line: usize,
    is_test: bool,
}

fn functions<'a>(lines: &[&'a str]) -> Vec<Function<'a>> {
    let mut functions = Vec::new();
    for (line, text) in lines.iter().enumerate() {
        let text = text.trim_start();
        let Some((before, rest)) = text.split_once("fn ") else { continue };
        let name = rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
        // In comments, strings and types of functions nothing is defined.
        if name.is_empty() || before.contains(['/', '"', '(']) {
            continue;
        }
        let is_test = lines
            .iter()
            .take(line)
            .rev()
            .map(|above| above.trim_start())
            .take_while(|above| above.starts_with("#[") || above.starts_with("//"))
            .any(|above| above.starts_with("#[test]"));
        functions.push(Function { name, line, is_test });
    }
    functions
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mentions_belong_to_what_follows_or_surrounds_them() {
        let id = format!("VR-{}-001", "MEM");
        let mut sources = Sources::default();
        let file = format!(
            "/// {id}.\n#[test]\nfn shows() {{\n    assert!(true, \"{id}\");\n}}\n/// {id}\nfn helps() {{}}\n"
        );
        sources.read_file("a/tests/b.rs", &file);
        let test = MentionKind::Test("a/tests/b.rs::shows".to_string());
        let kinds: Vec<_> = sources.mentions.iter().map(|mention| mention.kind.clone()).collect();
        assert_eq!(kinds, [test.clone(), test, MentionKind::Code]);
        assert_eq!(Vec::from_iter(&sources.tests), ["a/tests/b.rs::shows"]);
    }
}
