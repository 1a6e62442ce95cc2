{{/* The name of the Service and the prefix of every other name: that of the release. */}}
{{- define "windrow.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* The labels by which a program's pods are found. Called with (list $ "router"). */}}
{{- define "windrow.selector" -}}
app.kubernetes.io/name: windrow
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* The labels of an object. Called with (list $ "router"). */}}
{{- define "windrow.labels" -}}
{{ include "windrow.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
{{- end -}}

{{/* What every pod has. Called with (list $ "router"). */}}
{{- define "windrow.pod" -}}
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  # With this group, the container's user may read the Secrets.
  fsGroup: 10001
  seccompProfile:
    type: RuntimeDefault
topologySpreadConstraints:
  {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "windrow.selector" $ | nindent 8 }}
  {{- end }}
volumes:
  - name: cluster
    configMap:
      name: {{ include "windrow.name" (index . 0) }}
  - name: dsn
    secret:
      secretName: {{ (index . 0).Values.dsnSecret }}
      defaultMode: 0440
  {{- if eq (index . 1) "router" }}
  - name: tls
    secret:
      secretName: {{ (index . 0).Values.tls.secret }}
      defaultMode: 0440
  {{- end }}
  - name: tmp
    emptyDir: {}
{{- end -}}

{{/* What every container has. Called with (list $ "router"). */}}
{{- define "windrow.container" -}}
name: {{ index . 1 }}
image: "{{ (index . 0).Values.image.repository }}:{{ (index . 0).Values.image.tag | default (index . 0).Chart.AppVersion }}"
args: [{{ index . 1 }}, --config, /etc/windrow/cluster.toml]
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
volumeMounts:
  - name: cluster
    mountPath: /etc/windrow
    readOnly: true
  - name: dsn
    mountPath: /run/windrow/dsn
    readOnly: true
  {{- if eq (index . 1) "router" }}
  - name: tls
    mountPath: /run/windrow/tls
    readOnly: true
  {{- end }}
  - name: tmp
    mountPath: /tmp
{{- end -}}
