// Renders a Helm chart's templates where there is no helm: Go's own templates, and those of Helm's
// functions that the chart uses. Reads {"context": ..., "templates": {name: text}, "files": {name:
// text}} as JSON from standard input and writes {name: manifest}.
package main

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"sort"
	"strconv"
	"strings"
	"text/template"
)

type input struct {
	Context   map[string]interface{}
	Templates map[string]string
	Files     files
}

type files map[string]string

func (all files) Get(name string) string { return all[name] }

func main() {
	var given input
	check(json.NewDecoder(os.Stdin).Decode(&given))
	given.Context["Files"] = given.Files
	all := template.New("chart").Option("missingkey=zero")
	all.Funcs(functions(all))
	for name, text := range given.Templates {
		template.Must(all.New(name).Parse(text))
	}
	rendered := map[string]string{}
	for name := range given.Templates {
		var out strings.Builder
		check(all.ExecuteTemplate(&out, name, given.Context))
		rendered[name] = out.String()
	}
	check(json.NewEncoder(os.Stdout).Encode(rendered))
}

func functions(all *template.Template) template.FuncMap {
	return template.FuncMap{
		"include": func(name string, data interface{}) (string, error) {
			var out strings.Builder
			err := all.ExecuteTemplate(&out, name, data)
			return out.String(), err
		},
		"nindent": func(width int, text string) string {
			pad := "\n" + strings.Repeat(" ", width)
			return pad + strings.ReplaceAll(text, "\n", pad)
		},
		"dict": func(pairs ...interface{}) map[string]interface{} {
			made := map[string]interface{}{}
			for i := 0; i < len(pairs); i += 2 {
				made[pairs[i].(string)] = pairs[i+1]
			}
			return made
		},
		"set": func(all map[string]interface{}, name string, value interface{}) map[string]interface{} {
			all[name] = value
			return all
		},
		"get": func(all map[string]interface{}, name string) interface{} {
			if value, found := all[name]; found {
				return value
			}
			return ""
		},
		// The chart reads what its own toYaml has written: a line for each name, with JSON.
		"fromYaml": func(text string) map[string]interface{} {
			made := map[string]interface{}{}
			for _, line := range strings.Split(strings.TrimSpace(text), "\n") {
				name, value, _ := strings.Cut(line, ": ")
				var read interface{}
				check(json.Unmarshal([]byte(value), &read))
				made[name] = read
			}
			return made
		},
		"toJson": scalar,
		"kindIs": func(kind string, value interface{}) bool { return fmt.Sprintf("%T", value) == kind },
		"ceil": func(value interface{}) float64 {
			number, err := strconv.ParseFloat(fmt.Sprint(value), 64)
			check(err)
			return math.Ceil(number)
		},
		"fail":       func(text string) (string, error) { return "", fmt.Errorf("%s", text) },
		"toYaml":     func(value interface{}) string { return strings.TrimSuffix(toYaml(value, ""), "\n") },
		"toString":   func(value interface{}) string { return fmt.Sprint(value) },
		"quote":      func(value interface{}) string { return fmt.Sprintf("%q", fmt.Sprint(value)) },
		"replace":    func(old, new, text string) string { return strings.ReplaceAll(text, old, new) },
		"upper":      strings.ToUpper,
		"contains":   func(part, text string) bool { return strings.Contains(text, part) },
		"trimSuffix": func(suffix, text string) string { return strings.TrimSuffix(text, suffix) },
		"trunc": func(width int, text string) string {
			if len(text) > width {
				return text[:width]
			}
			return text
		},
		"ternary": func(yes, no interface{}, choice bool) interface{} {
			if choice {
				return yes
			}
			return no
		},
		"default": func(fallback, value interface{}) interface{} {
			if value == nil || value == "" || value == false || value == 0.0 {
				return fallback
			}
			return value
		},
		"add": func(values ...interface{}) int64 {
			total := int64(0)
			for _, value := range values {
				switch number := value.(type) {
				case float64:
					total += int64(number)
				case int:
					total += int64(number)
				}
			}
			return total
		},
	}
}

func toYaml(value interface{}, indent string) string {
	switch typed := value.(type) {
	case map[string]interface{}:
		names := []string{}
		for name := range typed {
			names = append(names, name)
		}
		sort.Strings(names)
		out := ""
		for _, name := range names {
			out += indent + name + ":" + nested(typed[name], indent)
		}
		return out
	case []interface{}:
		out := ""
		for _, item := range typed {
			out += indent + "-" + nested(item, indent)
		}
		return out
	}
	return indent + scalar(value) + "\n"
}

func nested(value interface{}, indent string) string {
	switch value.(type) {
	case map[string]interface{}, []interface{}:
		return "\n" + toYaml(value, indent+"  ")
	}
	return " " + scalar(value) + "\n"
}

func scalar(value interface{}) string {
	text, err := json.Marshal(value)
	check(err)
	return string(text)
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
