// Renders a Helm chart's templates as Helm does: Go's text/template with sprig's functions, and the
// few that Helm adds. Values and the chart's data come as JSON on the standard input.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
)

func main() {
	if err := render(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func render(folder string) error {
	var data map[string]any
	if err := json.NewDecoder(os.Stdin).Decode(&data); err != nil {
		return err
	}
	all := template.New("chart").Option("missingkey=zero")
	functions := sprig.TxtFuncMap()
	// JSON is YAML, so what is inserted means the same.
	functions["toYaml"] = func(value any) (string, error) {
		text, err := json.Marshal(value)
		return string(text), err
	}
	functions["required"] = func(message string, value any) (any, error) {
		if value == nil || value == "" {
			return nil, errors.New(message)
		}
		return value, nil
	}
	functions["include"] = func(name string, value any) (string, error) {
		var out bytes.Buffer
		err := all.ExecuteTemplate(&out, name, value)
		return out.String(), err
	}
	functions["fail"] = func(message string) (string, error) { return "", errors.New(message) }
	all.Funcs(functions)
	files, err := filepath.Glob(filepath.Join(folder, "*"))
	if err != nil {
		return err
	}
	sort.Strings(files)
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if _, err := all.New(filepath.Base(file)).Parse(string(text)); err != nil {
			return err
		}
	}
	for _, file := range files {
		name := filepath.Base(file)
		if !strings.HasSuffix(name, ".yaml") {
			continue
		}
		fmt.Printf("---\n")
		if err := all.ExecuteTemplate(os.Stdout, name, data); err != nil {
			return err
		}
	}
	return nil
}
