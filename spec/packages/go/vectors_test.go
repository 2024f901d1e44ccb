package vectors

import (
	"encoding/json"
	"io/fs"
	"testing"
)

func TestEveryFileIsThere(t *testing.T) {
	files, err := fs.Glob(Files, "vectors/*/*.json")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, name := range files {
		text, err := Files.ReadFile(name)
		if err != nil || !json.Valid(text) {
			t.Error(name, err)
		}
	}
}
